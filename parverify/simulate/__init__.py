"""How long a search would take on more ranks than there are: events in simulated time, with measured batch times."""
