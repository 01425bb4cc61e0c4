"""`python -m narrowcast`: the command line, where the script is not on the path."""

from narrowcast.cli import main

main()
