"""`python -m minibroker`: the command line."""

from minibroker import main

main()
