"""Sample on servers over HTTP: of jaxrl, of vLLM, started by the run or not."""
