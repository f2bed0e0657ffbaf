"""Names of other libraries, with their arguments; thin wrappers of the packages below."""
