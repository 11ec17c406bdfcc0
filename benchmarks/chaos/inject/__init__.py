"""What is put into the processes of a suite under test; the folder is on their PYTHONPATH."""
