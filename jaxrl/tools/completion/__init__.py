"""Body of `jaxrl completion`: the words that may follow, and a script for each shell."""
