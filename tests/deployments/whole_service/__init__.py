"""A package, for its fixtures end with it: without this file they would live as long as the run."""
