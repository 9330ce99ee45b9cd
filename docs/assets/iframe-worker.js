// Browsers start no Worker for a page that was opened from the file system, and the search of the
// theme is one. Here it runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = (this.inside = frame.contentWindow);
      this.ready = new Promise((resolve) => {
        const script = frame.contentDocument.createElement("script");
        script.src = address;
        script.onload = resolve;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = (...names) =>
          names.reduce((before, name) => before.then(() => load(frame.contentDocument, name)), Promise.resolve());
        frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() =>
        this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
  };

  const load = (where, name) =>
    new Promise((resolve) => {
      const script = where.createElement("script");
      script.src = name;
      script.onload = resolve;
      where.body.append(script);
    });
}
