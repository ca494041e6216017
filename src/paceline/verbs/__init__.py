"""Every command as a function of the library that returns a result."""
