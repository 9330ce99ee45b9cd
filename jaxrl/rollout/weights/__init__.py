"""Bring weights from the trainer to servers: in groups over a transfer, or by a folder."""
