"""A language model of GPT-2's size on real text, through several wires: tokens, a rank, a plan of runs, a figure."""
