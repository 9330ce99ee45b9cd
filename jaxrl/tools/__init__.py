"""Hold the bodies of the verbs beside it: each `jaxrl/<verb>.py` is the command of one."""
