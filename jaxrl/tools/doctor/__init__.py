"""Check a run on this machine before it starts.

`examination` has the checks in their order; each is a function of an `ExaminedRun` that returns a
`Finding`. Each of the other files is a family of checks.
"""
