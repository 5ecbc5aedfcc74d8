"""What is read from and written to the tables, a module for each noun."""
