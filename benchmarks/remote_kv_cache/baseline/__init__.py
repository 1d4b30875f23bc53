"""What the machine and the transports can do without a store."""
