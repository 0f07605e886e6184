"""The process-group transport.

========= ===================================================================
frames    what the two ends say to each other beside the bytes
messages  how the data segment is cut into messages, and where they lie
sealing   the digests of chunks, computed while they move
line      one rank's end of a conversation: the waits, and what breaks them
sending   state dict → snapshot → one conversation for each destination
receiving one conversation → arena or template → state dict
transport `PGTransport`
========= ===================================================================
"""
