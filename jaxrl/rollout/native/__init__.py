"""Sample with the trainer's own layers: slots of keys and values, prefill and decode programs."""
