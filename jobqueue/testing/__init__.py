"""What projects that use the queue need for their own tests; asks for the ``test`` extra."""
