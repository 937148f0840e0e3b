"""Engines carry a method through its rounds; the method does not know which one."""
