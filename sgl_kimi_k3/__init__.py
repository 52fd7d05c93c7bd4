"""An SGLang backend for Kimi K3: hybrid KDA and Gated MLA layers behind one pool and one tree."""
