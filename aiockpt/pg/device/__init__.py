"""The path of a transport whose group moves the memory of a device (NCCL).

Bytes that are on the device never come to the host, at either end: they are sent from
the state dict's own memory, small ones together; received into device memory; and
digested where they are. What is in host memory crosses the device message by message.

=========== =================================================================
folding     the digest of bytes on a device
segment     where each byte of a data segment is, on the device or not
board       the device: whose tensors are its own, its memory, its streams
staging     state dict → snapshot, most of which is the state dict itself
destination tensors of its own, or those of a template
mover       messages between two ranks, on the side stream
=========== =================================================================

All work is enqueued on side streams, behind what the caller's stream had been given
when it called. A wait for a group's operation holds up a stream, not a thread: threads
poll an event behind it until the deadline. (``Work.wait`` with a timeout would block,
and abort the communicator at its end.) So messages have a stream of their own, and
what is digested or loaded has arrived before.
"""
