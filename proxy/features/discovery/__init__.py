"""Engines that join and leave while the proxy runs: where they are named, and how they are taken in."""
