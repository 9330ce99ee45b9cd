"""Turn a batch into new parameters: objective, forward pass, update, policy and critic."""
