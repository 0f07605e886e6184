"""The process-group transport: checkpoints over gloo or NCCL, rank to rank.

A send ends when its receivers have the checkpoint, so nothing is published here. The
package uses `torch.distributed` only through `messages.GroupLike`, and knows nothing of
HTTP. The path begins at `transport.PGTransport`: `send_checkpoint` stages a snapshot
and holds one conversation with each receiver. `recv_checkpoint` is the receive of every
transport, `transfer.receive`, whose source holds the other end of the conversation.

============ =================================================================
transport    `PGTransport`: the public verbs, and the path of a send
source       `GroupSource`: the source of a receive, for the offer of one rank
conversation the control messages of both ends, and how a group breaks
messages     stages host memory, cuts it into messages, moves and digests them
device       the same for the memory of a device
============ =================================================================
"""
