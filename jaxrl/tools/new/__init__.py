"""Body of `jaxrl new`: the files of a project."""
