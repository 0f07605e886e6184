"""The swarm: receivers of one snapshot serve each other what they have.

`SwarmEndpoint` (`endpoint`) adds the swarm's part to a server: it answers
``{step}/members`` and ``{step}/have``, invites receivers, and limits what members are
sent. The `tracker` knows the members of a snapshot, and a `relay` is a checkpoint that
is served while it is received. The `messages` are what members and their source say.
"""
