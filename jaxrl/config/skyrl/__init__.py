"""From SkyRL's arguments, run scripts and YAML files to a recipe: `jaxrl.config.from_skyrl`."""
