"""Sample through JetStream: its engine API in this process, or its wire."""
