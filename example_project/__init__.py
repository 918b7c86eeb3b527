"""A small real site that uses every feature of jobqueue."""
