// The search of this site runs in a worker, and browsers start none for a page that was opened from a
// folder (file://). There a hidden frame does its work.
"use strict";

if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe"), script = document.createElement("script");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow, send = (to, data) => to.dispatchEvent(new MessageEvent("message", { data }));
      inside.postMessage = data => setTimeout(() => send(this, data));
      const ready = new Promise(resolve => (script.onload = resolve));
      this.postMessage = data => ready.then(() => send(inside, data));
      this.terminate = () => frame.remove();
      script.src = url;
      inside.document.head.append(script);
    }
  };
