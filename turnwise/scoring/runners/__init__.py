"""How scorers are run, one file each; the file name is the value of `scoring.run`."""
