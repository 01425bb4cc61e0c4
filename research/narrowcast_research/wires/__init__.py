"""What wires cost in accuracy, and how large their errors are on real gradients."""
