"""What `EngineProcess` is made of: forked processes, the messages to them, and what runs inside."""
