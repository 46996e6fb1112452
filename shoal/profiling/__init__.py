"""How long one part of a layer takes. `roofline`: estimated, for a device that is not here."""
