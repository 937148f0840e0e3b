"""Clients on other machines: what is asked, answered, and never leaves them; no transport is known here."""
