"""A simulated vLLM engine: real prefix-cache semantics, events, HTTP and metrics; no model, no GPU.

The core (`engine`, `blocks`, `offload`, `hashing`) does no I/O and has no clock: it is stepped with the time as an
argument, and is held to recordings of a real engine. `runner`, `server` and `cli` put it on the wire.
"""
