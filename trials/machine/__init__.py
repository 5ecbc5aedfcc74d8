"""What the processes of this project may use of their machine."""
