"""What the tests share: processes, servers, peers, faults, and leak checks."""
