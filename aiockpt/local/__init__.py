"""What a transport does with other processes of its host.

A `server_process` serves what the trainer publishes, at the trainer's sockets:
`_server_main` is its program, and `messages` are what both say. A `lender` gives other
processes of the same user the memory of a published snapshot instead of bytes; they
`attach` it.
"""
