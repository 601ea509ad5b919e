"""What is shared by everything that divides work over devices."""
