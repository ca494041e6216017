"""Tables and pictures of records. Nothing here measures, and every picture says where its numbers come from."""
