"""Every command as a library function that returns a result."""
