"""Manifests of a job's objects. Pure: the same job and arguments give the same manifests.

Each manifest carries a hash of itself, by which the operator sees whether what runs is what the spec asks
for.
"""
