"""What a run says of itself: diagnostics, alarms, loggers, callbacks, profiles (docs/watching.md).

`Recorder` puts the parts together for the trainer.
"""
