// A page that was opened as a file may not start a worker, which is where the search runs. Here the worker's script
// runs in a hidden frame instead, with the two functions of a worker that it calls.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (src) =>
        new Promise((resolve, reject) => {
          const script = Object.assign(frame.contentDocument.createElement("script"), { src, onload: resolve });
          script.onerror = () => reject(new Error(`cannot load ${src}`));
          frame.contentDocument.body.append(script);
        });
      this.inside.importScripts = async (...urls) => {
        for (const each of urls) await load(each);
      };
      this.loaded = load(new URL(url, location).href);
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
