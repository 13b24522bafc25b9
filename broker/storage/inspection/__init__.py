"""Reading the files of a stopped broker without changing a byte."""
