"""Write what a run leaves behind: checkpoints, ledger, logs and alarms; lock its folders."""
