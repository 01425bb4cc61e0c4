"""python -m narrowcast.cli"""

from narrowcast.cli import main

main()
