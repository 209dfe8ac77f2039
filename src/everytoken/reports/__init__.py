"""The page of one or several runs: what came out, how sure it is, what was different, and pictures to look at."""
