"""`tierpick demo`: a simulated fleet, a real Envoy and the picker on one machine, and a table of what came of it."""
