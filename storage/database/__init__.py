"""Tables, connections and rows."""
