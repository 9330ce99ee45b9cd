"""The checks of `jaxrl.doctor`: one file per family, each check a function of a `Subject`."""
