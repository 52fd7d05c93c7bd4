"""Other systems' policies, each in its best honest form, as servers for the simulator."""
