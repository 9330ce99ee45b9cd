"""Prove on a machine that jaxrl works there, and how fast.

`proof` runs the sections, each in a process of its own (`child`), and keeps their results;
`work` says how much each measures. Each of the other files is a section or two, but for `page`.
"""
