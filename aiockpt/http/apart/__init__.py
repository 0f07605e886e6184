"""A server in a process of its own, which the trainer's interpreter cannot slow down.

What the trainer stages lies in memory that both have; what it says travels as small
messages. See ``remote`` for the trainer's end and ``child`` for the other one.
"""
