"""One folder for each process of the suite."""
